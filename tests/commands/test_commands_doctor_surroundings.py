"""What the doctor asks outside its process, on machines that are made of files and tables."""

from qat_lora.commands import doctor as surroundings
from qat_lora.runtime.launch.select import Found

TPU = Found(tpu="/dev/accel0", torch_xla=True)


def machine(root, pci_device, chips):
    folder = root / "sys/bus/pci/devices/0000:00:05.0"
    folder.mkdir(parents=True)
    (folder / "device").write_text(f"{pci_device}\n")
    (root / "dev").mkdir()
    for i in range(chips):
        (root / f"dev/accel{i}").touch()
    return root


def test_a_tpu_is_named_by_the_bus_or_by_its_variable(tmp_path):
    root = machine(tmp_path, "0x006f", 4)
    (chip,) = surroundings.accelerators({}, TPU, root)
    assert chip[:2] == ("TPU v6e", 4) and round(chip.memory_gib, 1) == 29.8
    (chip,) = surroundings.accelerators({"TPU_ACCELERATOR_TYPE": "v5litepod-8"}, TPU, root)
    assert chip[:2] == ("TPU v5e", 4) and round(chip.memory_gib, 1) == 14.9


def test_an_unknown_tpu_is_not_given_a_size(tmp_path):
    (chip,) = surroundings.accelerators({}, TPU, machine(tmp_path, "0x9999", 0))
    assert chip == ("TPU of unknown kind", 1, None)
    assert surroundings.accelerators({}, Found(), tmp_path) == []


def test_cards_are_counted_by_kind():
    table = "NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 80GB HBM3, 81559\nOld card, [N/A]\n"
    h100, old = surroundings.nvidia_cards(table)
    assert h100[:2] == ("NVIDIA H100 80GB HBM3", 2) and round(h100.memory_gib, 1) == 79.6
    assert old == ("Old card", 1, None) and surroundings.nvidia_cards("") == []


def test_the_hubs_silence_is_told():
    assert surroundings._unreachable("http://127.0.0.1:9/")  # nothing listens on the discard port
    assert surroundings._unreachable("nonsense")


def test_libtpu_is_what_torch_xla_asks_for():
    assert surroundings.libtpu_specifier() in ("", "==0.0.21")
