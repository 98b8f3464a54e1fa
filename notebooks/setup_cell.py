# The same cell in every notebook, made from notebooks/setup_cell.py. The first time it takes about five minutes.
import glob
import importlib.metadata
import importlib.util
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

REPOSITORY = os.environ.get("QAT_LORA_REPOSITORY", "https://github.com/OWNER/qat-lora")
EXTRAS = {"hub": "datasets", "plot": "matplotlib", "log": "wandb", "notebook": "ipywidgets"}  # and a module of each
toy = os.environ.get("QAT_LORA_TOY") == "1"  # the tests' small run
platform = "colab" if "COLAB_RELEASE_TAG" in os.environ else "kaggle" if "KAGGLE_KERNEL_RUN_TYPE" in os.environ else ""
root = Path(os.environ.get("QAT_LORA_ROOT") or {"colab": "/content", "kaggle": "/kaggle/working"}.get(platform, "."))
kept = None  # where outputs are copied to survive the session; None: they do where they are


def is_tpu():
    """Tell whether there is a TPU: a file of its driver, a PCI device of Google's beside one, or a variable."""
    google = any(Path(file).read_text().strip() == "0x1ae0" for file in glob.glob("/sys/bus/pci/devices/*/vendor"))
    files = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*") * google
    return bool(files or os.environ.get("TPU_ACCELERATOR_TYPE") or os.environ.get("TPU_NAME"))


def install():
    """Clone and install what is missing; return loaded packages that now have another version on disk."""
    wanted = EXTRAS | ({"tpu": "torch_xla"} if is_tpu() else {})
    if toy and not platform or all(map(importlib.util.find_spec, ("qat_lora", *wanted.values()))):
        return []
    clone = Path(tempfile.gettempdir()) / "qat-lora" if platform else Path.cwd().parent
    if not (clone / "pyproject.toml").is_file():
        subprocess.run(["git", "clone", "-q", "--depth", "1", REPOSITORY, str(clone)], check=True)
    owners = importlib.metadata.packages_distributions()
    loaded = {name: importlib.metadata.version(name) for module in set(sys.modules) for name in owners.get(module, ())}
    tested = [] if platform else ["-c", str(clone / "constraints.txt")]  # a platform keeps the torch of its driver
    what = f"{clone}[{','.join(wanted)}]"
    print(f"installing {what}: some minutes", flush=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *tested, "-e", what], check=True)
    site.addsitedir(sysconfig.get_path("purelib"))  # a running kernel has read its .pth files already
    importlib.invalidate_caches()
    return [name for name, version in loaded.items() if importlib.metadata.version(name) != version]


def take_secret(name):
    """Put one of the platform's secrets where libraries look for it; its value is printed nowhere."""
    if not platform or name in os.environ:
        return
    try:
        if platform == "colab":
            from google.colab import userdata

            value = userdata.get(name)
        else:
            from kaggle_secrets import UserSecretsClient

            value = UserSecretsClient().get_secret(name)
    except Exception as error:
        print(f"no secret {name} ({type(error).__name__}): fine unless something private is needed")
    else:
        os.environ[name] = value


def go_to_work():
    """Go to a folder whose `runs` survive the session; return where `keep` copies to."""
    if platform != "colab":
        if platform:
            os.chdir(root)  # Kaggle keeps /kaggle/working with a saved version; attached outputs are read-only
            for old in (*root.parent.glob("input/**/caches/*"), *root.parent.glob("input/**/runs/*")):
                bring(old, Path(old.parent.name, old.name))
        return None
    from google.colab import drive

    drive.mount(str(root / "drive"))
    home, work = root / "drive/MyDrive/qat-lora", root / "qat-lora-work"
    for folder in (home / "runs", home / "caches", work):
        folder.mkdir(parents=True, exist_ok=True)
    os.chdir(work)  # caches are read at random, so on the fast disk; runs are written to Drive
    if not Path("runs").exists():
        Path("runs").symlink_to(home / "runs")
    for old in (home / "caches").glob("*"):
        bring(old, Path("caches", old.name))
    return home


def bring(old, new):
    """Copy a folder unless it is there or half copied; the copy is complete or absent."""
    if old.is_dir() and not new.exists() and not old.name.endswith(".partial"):
        new.parent.mkdir(parents=True, exist_ok=True)
        partial = new.with_name(f"{new.name}.partial")
        shutil.copytree(old, partial, dirs_exist_ok=True)
        partial.rename(new)


def keep(folder):
    """Copy a finished folder to where it survives the session."""
    if kept is not None:
        bring(Path(folder), kept / folder)


if platform == "kaggle":  # set for a slice of several hosts, which libtpu then waits for
    for name in ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID"):
        os.environ.pop(name, None)
if stale := install():
    print(f"{', '.join(sorted(stale))}: loaded in an older version. The kernel restarts; then choose Run all again.")
    get_ipython().kernel.do_shutdown(True)
    raise SystemExit
for secret in ("HF_TOKEN", "WANDB_API_KEY"):
    take_secret(secret)
kept = go_to_work()

from qat_lora.commands.doctor import Accelerator, accelerators
from qat_lora.plan.devices import KNOWN
from qat_lora.runtime.launch.select import look

found = next(iter(accelerators(os.environ, look())), Accelerator("CPU", 1, None))
device = {"TPU": "tpu", "CPU": "cpu"}.get(found.name[:3], "cuda")
chips, memory_gib, disk_gib = found.number, found.memory_gib or 8, shutil.disk_usage(Path.cwd()).free / 2**30
rate = KNOWN[next((kind for kind in KNOWN if kind in found.name.lower()), "laptop")].tflops * chips
print(f"{platform or 'no platform'}: {found.name}, outputs in {kept or root}")


def announce(what, tokens, gflops):
    """Say how long a cell takes by a roofline of `gflops` a token; nothing of it was measured on these machines."""
    if not toy:
        print(f"{what}: about {tokens * gflops / (0.6e3 * rate) / 60 + 1:,.0f} minutes, an estimate", flush=True)
