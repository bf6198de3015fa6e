"""The wheel and the sdist: what they hold, what an empty environment can do with them, and the main job from
a wheel."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pytest

from pipeline.commands.extras import EXTRAS
from pipeline.ledger.ledger import Ledger
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.sources.pushed import framed

ROOT = Path(__file__).resolve().parent.parent
MOST_MIB = 80  # of the base install, dependencies included
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
# Distributions that are imported under another name.
IMPORTED_AS = {
    "confluent-kafka": "confluent_kafka",
    "nvidia-ml-py": "pynvml",
    "opensearch-py": "opensearchpy",
    "opentelemetry-proto": "opentelemetry",
    "googleapis-common-protos": "google",
    "grpcio": "grpc",
    "python-multipart": "python_multipart",
    "nats-py": "nats",
    "protobuf": "google",
}

pytestmark = pytest.mark.timeout(300)


class Built(NamedTuple):
    tree: Path  # the files that git knows, without what lies beside them
    wheel: Path
    sdist: Path
    backend: dict[str, str]  # the environment that builds


def done(*command: str | Path, **options: object) -> str:
    said = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert said.returncode == 0, said.stdout + said.stderr
    return str(said.stdout)


def pip(*arguments: str | Path) -> None:
    done(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=ROOT)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    for name in done("git", "ls-files", cwd=ROOT).splitlines():
        if (ROOT / name).exists():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "tree" / name).write_bytes((ROOT / name).read_bytes())
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pip("install", "--quiet", "--target", folder / "backend", *requires)
    env = {**os.environ, "PYTHONPATH": str(folder / "backend")}
    names = [
        done(sys.executable, "-c", BUILD, kind, folder, cwd=folder / "tree", env=env).splitlines()[-1]
        for kind in ("sdist", "wheel")
    ]
    return Built(tree=folder / "tree", sdist=folder / names[0], wheel=folder / names[1], backend=env)


def environment(folder: Path) -> Path:
    """The `bin` of a new environment without any package, not even pip."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    return folder / "bin"


def install(into: Path, *arguments: str | Path) -> None:
    pip(
        "--python",
        into / "python",
        "install",
        "--quiet",
        "--no-compile",
        "-c",
        ROOT / "constraints.txt",
        *arguments,
    )


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist() if not name.endswith("/RECORD")}


@pytest.mark.long
def test_the_wheel_holds_every_file_of_the_package(built: Built) -> None:
    package = built.tree / "pipeline"
    assert {str(p.relative_to(built.tree)) for p in package.rglob("*") if p.is_file()} <= content(
        built.wheel
    ).keys()


@pytest.mark.long
def test_the_sdist_builds_the_same_wheel(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as file:
        # Python before 3.11.4 has no filters.
        file.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (tree,) = tmp_path.iterdir()
    name = done(sys.executable, "-c", BUILD, "wheel", tmp_path, cwd=tree, env=built.backend).splitlines()[-1]
    assert content(tmp_path / name) == content(built.wheel)


def test_every_extra_says_what_its_packages_are_imported_as() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        found = {requirement.partition(">")[0].partition("[")[0] for requirement in requirements}
        return {IMPORTED_AS.get(name, name) for name in found - {"logweir"}}

    extras = project["optional-dependencies"]
    assert {extra: names(extras[extra]) for extra in EXTRAS} == {k: set(v) for k, v in EXTRAS.items()}
    # Only an export needs the package of `delta`.
    wanted = ",".join(extra for extra in EXTRAS if extra != "delta")
    assert set(extras["all"]) == {f"logweir[{wanted}]"}
    assert not names(project["dependencies"]) & {name for packages in EXTRAS.values() for name in packages}


def locked(name: str) -> dict[str, str]:
    """Name and version of each entry of a file in requirements/."""
    text = (ROOT / "requirements" / name).read_text()
    entries = re.split(r"\n(?=\S)", text.partition("\n")[2].rstrip())
    assert all("--hash=sha256:" in entry for entry in entries)
    pins = (entry.split()[0].partition("==") for entry in entries)
    return {normal(package): version for package, _, version in pins}


def normal(package: str) -> str:
    return re.sub("[-_.]+", "-", package).lower()


def test_every_package_of_ci_and_of_the_image_is_locked_with_hashes() -> None:
    run, dev, cuda = (locked(name) for name in ("run.txt", "dev.txt", "cuda.txt"))
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {normal(line.partition("==")[0]): line.partition("==")[2] for line in lines if "==" in line}
    del pins["atheris"]  # of the extra `fuzz`, which neither installs
    both = run | dev
    assert not run.keys() & dev.keys()
    assert {name: both.get(name) for name in pins} == pins, "run scripts/lock_hashes"
    assert locked("cpu.txt") == {"torch": f"{run['torch']}+cpu"}
    assert not [name for name in both if name.startswith(("nvidia-cu", "cuda-")) or name == "triton"]
    assert {"triton", "nvidia-cublas"} <= cuda.keys()
    assert {"build", "pip-audit"} <= locked("ci.txt").keys()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def direct(*names: str) -> set[str]:
        texts = [text for name in names for text in extras[name]]
        return {normal(found[0]) for text in texts if (found := re.match(r"[\w.-]+", text))} - {"logweir"}

    wanted = {normal(re.split(r"[<>=]", text)[0]) for text in project["dependencies"]}
    assert wanted | direct("worker", "intake", "gpu", "opensearch", "s3") <= run.keys(), (
        "run scripts/lock_hashes"
    )
    assert direct("dev", "docs") <= both.keys(), "run scripts/lock_hashes"


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "requirements/cpu.txt"])
def test_the_environment_is_set_up_again_when_a_file_that_it_is_made_from_changes(
    tmp_path: Path, name: str
) -> None:
    for file in (
        "scripts/_setup.sh",
        "pyproject.toml",
        "constraints.txt",
        "requirements/run.txt",
        "requirements/cpu.txt",
    ):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())

    def version() -> str:
        return done("bash", "-c", f". {tmp_path}/scripts/_setup.sh && version_of_packages", cwd=tmp_path)

    before = version()
    assert version() == before
    with (tmp_path / name).open("a") as file:
        file.write("# another\n")
    assert version() != before


def test_the_image_takes_nothing_without_a_hash_or_a_digest() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    installs = [part for part in re.split(r"&&|\n", text) if "pip install" in part]
    assert installs and all("--no-deps" in part for part in installs)
    assert all("--require-hashes" in part or "--no-build-isolation" in part for part in installs)
    images = re.findall(r"(?m)^FROM (\S+)", text)
    images += re.findall(r"(?m)^ +image: (\S+)", (ROOT / "docker-compose.yml").read_text())
    foreign = [image for image in images if not image.startswith("logweir:")]
    assert foreign and all(re.search(r"@sha256:[0-9a-f]{64}$", image) for image in foreign), foreign


SENDS = """
import sys
from pipeline import Producer, Settings
producer = Producer.connect(Settings.load())
lines = ["one", "Traceback (most recent call last):", "  x"]
for items in (lines, [{"message": "two", "timestamp": "2026-11-20T10:00:00Z"}]):
    print(producer.send(items, workload="shop", batch_id=str(len(items))))
"""


NOBODY = "http://127.0.0.1:9"
ASKS = """
import sys
from pipeline.cli import main
url, *verbs = sys.argv[1:]
codes = {main(["--url", url, *verb.split()]) for verb in verbs}
raise SystemExit(codes.pop() if len(codes) == 1 else str(codes))
"""


@pytest.mark.long
def test_a_base_install_is_small_sends_and_says_what_is_missing(
    built: Built, tmp_path: Path, settings: Settings
) -> None:
    into = environment(tmp_path / "base")
    install(into, built.wheel)
    files = [path for path in (tmp_path / "base").rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < MOST_MIB * 2**20
    assert "VERB" in done(into / "logweir", "--help", cwd=tmp_path)
    face = "from pipeline import Client, Need, Pool, Producer, Settings; print(Producer.__module__)"
    assert done(into / "python", "-c", face, cwd=tmp_path) == "pipeline.producer\n"
    env = {**os.environ, **settings.to_environ()}
    sent = subprocess.run(
        [into / "python", "-c", SENDS], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    lines = sent.stdout.splitlines()
    assert len(lines) == 2 and all(line.startswith("Accepted(batch_id=") for line in lines), lines
    assert sent.stderr == "", "a push that cannot wake the workers says so there"
    ledger = Ledger(connect(settings), settings)
    assert [framed(ledger.payload(name))[0]["lines"].to_list() for name in "31"] == [[1, 2], [1]]
    # Through an API nothing more is needed; here none answers. All in one process, after one of its own.
    remote = ("status", "results", "patterns", "units", "incidents", "models list", "train --list", "watch list",
              "mark --list", "dead list", "senders", "gpu top", "gpu usage --csv")  # fmt: skip
    for command, verbs in (
        ([into / "logweir", "--url", NOBODY, *remote[0].split()], remote[:1]),
        ([into / "python", "-c", ASKS, NOBODY, *remote], remote),
    ):
        answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert answer.returncode == 1, answer
        said = answer.stderr.splitlines()
        assert len(said) == len(verbs), answer
        assert all(line.startswith(f"logweir: {NOBODY} does not answer (") for line in said), answer
    checked = subprocess.run(
        [into / "logweir", "doctor"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 1 and checked.stderr == "", checked
    assert re.search(r"(?m)^missing packages: .* run: pip install '\.\[worker\]'", checked.stdout), checked
    for verb in (["run", "app.log"], ["up"], ["send", "app.log"], ["results"]):
        answer = subprocess.run(
            [into / "logweir", *verb], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert answer.returncode == 2, answer
        assert answer.stderr.count("\n") == 1
        assert answer.stderr.startswith("logweir: this needs packages that are not installed (")
        remedy = "): pip install '.[worker]' in a clone of logweir"
        elsewhere = "; without them --url asks a pipeline elsewhere" if verb == ["results"] else ""
        assert answer.stderr.endswith(f"{remedy}{elsewhere}\n"), answer.stderr
    status = subprocess.run(
        [into / "logweir", "status"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert status.returncode == 2 and "no logweir stack runs" in status.stderr, status


@pytest.mark.long
def test_the_main_job_runs_from_an_installed_wheel(built: Built, tmp_path: Path) -> None:
    """The heavy packages are those of this environment; the wheel's own package comes before whatever it
    has."""
    into = environment(tmp_path / "full")
    install(into, "--no-deps", built.wheel)
    (own,) = (tmp_path / "full").glob("lib/python*/site-packages")
    (own / "zz-others.pth").write_text(f"{Path(pl.__file__).parents[1]}\n")
    where = done(into / "python", "-c", "import pipeline; print(pipeline.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(own)
    log = tmp_path / "app.log"
    known = "".join(
        f"2026-11-20T10:00:{n % 60:02}Z INFO app: served request {n} in {n % 90} ms\n" for n in range(400)
    )
    log.write_text(known + "2026-11-20T10:01:00Z FATAL app: the disk caught fire\n")
    env = {**os.environ, "HOME": str(tmp_path)}
    said = done(into / "logweir", "run", log, "--out", tmp_path / "out", "--json", cwd=tmp_path, env=env)
    assert json.loads(said)["lines"] == 401
    stored = pl.read_parquet(tmp_path / "out" / "results" / "**" / "*.parquet")
    assert stored.height == 401
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
