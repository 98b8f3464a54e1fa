"""The order of things at the start: device first, then the heavy imports, then the command."""

from types import SimpleNamespace

import pytest

from qat_lora import launch
from qat_lora.errors import DeviceError
from qat_lora.options import RunConfig


def test_the_device_is_chosen_before_the_command_is_imported(monkeypatch):
    happened = []

    class Runtime:
        def launch(self, main):
            happened.append("launch")
            return main()

    def select(device, tpu):
        happened.append(("select", device, tpu))
        return Runtime()

    def import_module(name):
        happened.append(("import", name))
        return SimpleNamespace(command=lambda options, runtime: (options, runtime))

    monkeypatch.setattr(launch, "select_runtime", select)
    monkeypatch.setattr(launch, "importlib", SimpleNamespace(import_module=import_module))
    options = SimpleNamespace(run=RunConfig(device="cpu"))
    given, runtime = launch.run("command", options, "some.module")
    assert given is options and isinstance(runtime, Runtime)
    assert happened == [("select", "cpu", False), "launch", ("import", "some.module")]


def test_a_missing_device_stops_before_any_import(monkeypatch):
    def none(device, tpu):
        raise DeviceError("none here")

    monkeypatch.setattr(launch, "select_runtime", none)
    monkeypatch.setattr(launch, "importlib", None)
    with pytest.raises(DeviceError):
        launch.run("recover", SimpleNamespace(run=RunConfig()))
