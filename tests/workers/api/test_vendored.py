"""The files of others that the console serves are those that vendor.toml names."""

import hashlib
import tomllib

from pipeline.workers.api.console.views import STATIC, static_file

FOLDER = "vendor/"


def test_every_vendored_file_has_its_hash_and_its_licence() -> None:
    from importlib.resources import files

    place = files("pipeline.workers.api.console") / "static" / "vendor"
    packages = tomllib.loads((place / "vendor.toml").read_text(encoding="utf-8"))["package"]
    named = {file["name"]: file["sha256"] for package in packages for file in package["file"]}
    there = {path.name for path in place.iterdir()} - {"vendor.toml"}
    assert there == named.keys()
    for name, digest in named.items():
        assert hashlib.sha256((place / name).read_bytes()).hexdigest() == digest, name
    assert all(any("LICENSE" in file["name"] for file in package["file"]) for package in packages)
    served = {name.removeprefix(FOLDER) for name in STATIC if name.startswith(FOLDER)}
    assert served == {name for name in named if "LICENSE" not in name}


def test_no_file_of_the_console_names_another_host() -> None:
    for name in STATIC:
        if not name.startswith(FOLDER) and name != "icon.svg":
            body, _ = static_file(name)
            assert b"//" not in body.replace(b"// ", b""), name
