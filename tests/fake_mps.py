"""A control program of MPS that answers as NVIDIA's does, and daemons for it: directories with a file
`pid`."""

import textwrap
from pathlib import Path

from pipeline.gpu.node import mps


def control_program(folder: Path) -> str:
    """A PATH with the program. A file `hangs` in a daemon's directory makes it hang."""
    program = folder / "bin" / mps.CONTROL
    program.parent.mkdir()
    program.write_text(
        textwrap.dedent("""\
            #!/bin/sh
            dir="$CUDA_MPS_PIPE_DIRECTORY"
            if [ "$1" = "-d" ]; then
              if [ -e "$CUDA_MPS_LOG_DIRECTORY/fails" ]; then echo "cannot start"; exit 1; fi
              echo "$CUDA_VISIBLE_DEVICES" > "$dir/pid"
              exit 0
            fi
            read command argument
            if [ -e "$dir/hangs" ]; then exec sleep 30; fi
            if [ ! -e "$dir/pid" ]; then echo "Cannot find MPS control daemon process"; exit 1; fi
            case "$command" in
              get_server_list) cat "$dir/servers" 2>/dev/null ;;
              quit) rm "$dir/pid" ;;
              get_client_list) cat "$dir/clients-$argument" 2>/dev/null ;;
              *) exit 1 ;;
            esac
            exit 0
            """)
    )
    program.chmod(0o755)
    return f"{program.parent}:/usr/bin:/bin"


def a_daemon(place: Path, **lists: str) -> Path:
    """`servers` lists servers; `clients_100` the clients of server 100."""
    place.mkdir(parents=True)
    (place / "pid").touch()
    for name, text in lists.items():
        (place / name.replace("_", "-")).write_text(text)
    return place
