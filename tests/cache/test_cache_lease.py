"""Leases: one holder at a time, the dead succeeded, the sleeping stopped."""

import threading
import time

import pytest

from qat_lora.cache.storage import lease
from qat_lora.cache.storage.lease import hold
from qat_lora.errors import OutputExistsError


class Store:
    """Objects in a dict; a create is atomic, as in real stores."""

    def __init__(self):
        self.objects = {}
        self.turn = threading.Lock()

    def __str__(self):
        return "store://x"

    def names(self):
        with self.turn:
            return sorted(self.objects)

    def has(self, name):
        return name in self.objects

    def read(self, name, limit_bytes):
        return self.objects[name]

    def create(self, name, data):
        with self.turn:
            if self.objects.setdefault(name, data) != data:
                raise FileExistsError(name)

    def replace(self, name, data):
        with self.turn:
            self.objects[name] = data


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(lease, "BEAT_S", 0.02)
    monkeypatch.setattr(lease, "SILENCE_S", 0.2)
    return Store()


def test_a_holder_that_lives_is_not_succeeded(store):
    with hold(store, ".lock") as first:
        first.check()
        busy = "store://x: another builder is writing there .*process"
        with pytest.raises(OutputExistsError, match=busy), hold(store, ".lock"):
            pass
        with hold(store, ".lock.1") as other:  # another builder's lock
            other.check()
        first.check()
    begun = time.monotonic()
    with hold(store, ".lock") as later:  # given back: no waiting
        assert time.monotonic() - begun < lease.SILENCE_S
        assert later.name == ".lock-000002"


def test_a_dead_holder_is_succeeded_and_one_that_wakes_up_stops(store):
    with hold(store, ".lock") as asleep:
        store.replace = lambda name, data: None  # suspended: its beats do not arrive
        begun = time.monotonic()
        after = Store.replace
        with pytest.raises(OutputExistsError, match="another builder has taken over"):
            taken = hold(store, ".lock")
            taken.__enter__()
            assert time.monotonic() - begun >= lease.SILENCE_S
            asleep.check()
        store.replace = lambda name, data: after(store, name, data)
        taken.__exit__(None, None, None)
    with hold(store, ".lock") as later:
        assert later.name == ".lock-000003"


def test_of_many_that_wait_for_the_dead_one_succeeds(store):
    store.create(".lock-000041", b"some host process 7 token 3\n")
    held, refused = [], []
    done = threading.Event()

    def wait():
        try:
            with hold(store, ".lock") as mine:
                held.append(mine.name)
                done.wait(2)
        except OutputExistsError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(8)]
    for thread in threads:
        thread.start()
    while len(refused) < 7:
        time.sleep(0.01)
    done.set()
    for thread in threads:
        thread.join()
    assert held == [".lock-000042"] and len(refused) == 7
