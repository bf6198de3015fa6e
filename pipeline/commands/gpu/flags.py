"""The flags of `logweir gpu ...`. Imports nothing heavy: every command line builds them."""

import argparse
from typing import Any, Final

EXAMPLES: Final = """examples:
  logweir gpu top                                          who has the GPUs, and what really happens there
  logweir gpu run --memory 4GiB --compute 25 -- python train.py
  logweir gpu run --exclusive --for 2h -- ./fit.sh         a whole GPU alone
  logweir gpu run --exclusive --devices 4 --same-node --model A100 --cpu 8 -- torchrun ...
  env=$(logweir gpu request --memory 4GiB --shell) && eval "$env" && ./anything
                                                           for a program that is started some other way
  logweir gpu release "$GPU_LEASE" --token "$GPU_LEASE_TOKEN"
  logweir gpu submit --memory 8GiB --upload src -- python train.py
                                                           on whatever machine of the pool has room and takes jobs
  logweir gpu submit --exclusive --devices 4 --retries 2 --upload src -- python train.py
                                                           a gang: a process per device, with torchrun's variables
  logweir gpu submit --memory 8GiB --image docker.io/pytorch/pytorch --upload src -- python train.py
                                                           in a container, by the Podman or Docker of that machine
  logweir gpu models put fraud fraud.onnx --memory 2GiB    serve a model on whatever node has room for it
  logweir gpu usage --since 30d --by kind                  how many GPU-hours of training, scoring, users
  logweir gpu tenants set research --gpu-hours 100/month   a budget of GPU-hours
"""


def add(verbs: Any, common: argparse.ArgumentParser, place: argparse.ArgumentParser) -> None:
    """Add the verb `gpu` with all that it does."""
    text = "the pool of GPUs: who has what, run a program inside a lease, lend and take back"
    gpu = verbs.add_parser(
        "gpu",
        help=text,
        description=text[0].upper() + text[1:] + ". See docs/gpu.md.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = gpu.add_subparsers(dest="action", metavar="WHAT", required=True)

    def action(name: str, text: str, **kwargs: Any) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(
            name, parents=[common, place], help=text, description=text[0].upper() + text[1:] + ".", **kwargs
        )
        parser.set_defaults(command="gpu.verbs")
        return parser

    _looking(action)
    _running(action)
    _submitting(action)
    _serving(action)
    _lending(action)


def _looking(action: Any) -> None:
    top = action(
        "top", "devices, leases on them and who waits: leased beside really used; live in a terminal"
    )
    top.add_argument("--once", action="store_true", help="one picture, not a live view")
    top.add_argument(
        "--why",
        action="store_true",
        help="also what packing looks ahead by, and where the next needs would go",
    )
    top.add_argument("--interval", metavar="SPAN", default="1s", help="time between two pictures (1s)")
    action("leases", "leases that live, with the ids and tokens that release and revoke take")
    usage = action("usage", "GPU-hours and GiB-hours of ended leases, from the store of the pipeline")
    usage.add_argument(
        "--since", metavar="TIME", help="count from then on: 30d, 2026-11-01; default: all that is stored"
    )
    usage.add_argument("--until", metavar="TIME", help="count up to then; default: now")
    usage.add_argument(
        "--by",
        choices=("tenant", "user", "node", "device", "model", "kind", "day"),
        default="tenant",
        help="sums by (tenant); days are those of UTC",
    )
    usage.add_argument("--csv", action="store_true", help="print the sums as CSV")
    _accounting(action)


def _accounting(action: Any) -> None:
    tenants = action(
        "tenants",
        "who may use the GPUs: quota, budget, what each holds now and has used lately; set changes a budget",
        usage="logweir gpu tenants [add NAME | remove NAME | set NAME --gpu-hours N/PERIOD] [flags]",
    )
    tenants.add_argument(
        "change",
        nargs="?",
        choices=("add", "remove", "set"),
        help="add: a tenant with a key of its own; remove: refuse that key; set: a budget; without: the table",
    )
    tenants.add_argument("tenant_name", nargs="?", metavar="NAME", help="the tenant")
    tenants.add_argument(
        "--weight",
        type=float,
        default=1.0,
        metavar="W",
        help="of a tenant that gpu_tenants does not name, when it is added (1)",
    )
    tenants.add_argument(
        "--gpu-hours",
        metavar="N/PERIOD",
        help="its budget: 100/month, 25/week or 4.5/day, in periods of UTC; none takes it away",
    )
    tenants.add_argument(
        "--over",
        choices=("queue", "refuse"),
        default="queue",
        help="needs beyond the budget wait for the next period, or are refused (queue)",
    )

    agents = action(
        "agents",
        "Redis users of agents on other machines: a token lets one join the pool, and reach nothing else",
        usage="logweir gpu agents [token NAME | remove NAME] [flags]",
    )
    agents.add_argument(
        "change",
        nargs="?",
        choices=("token", "remove"),
        help="token: print the REDIS_URL of an agent, with a new password; remove: refuse it; without: list them",
    )
    agents.add_argument("agent_name", nargs="?", metavar="NAME", help="the agent, by the name of its machine")


def _running(action: Any) -> None:
    run = action(
        "run",
        "run a program inside a lease on this machine's GPUs, and give it back however the program ends",
        usage="logweir gpu run [flags] -- CMD [ARG ...]",
        epilog="The exit code is the program's; 75 when it got no GPU in time, its name was in use, Redis "
        "did not answer, or the GPU had to be given back; 127 and 126 when it cannot be started, 137 when "
        "it was stopped for using more memory than it leased.",
    )
    _need(run)
    run.add_argument(
        "--wait", metavar="SPAN", help="give up when there is no GPU after so long; default: wait for ever"
    )
    run.add_argument(
        "--grace",
        metavar="SPAN",
        default="10s",
        help="between asking the program to end and forcing it, when the lease must be given back (10s)",
    )
    run.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="CMD", help="the program and its arguments, after --"
    )


def _submitting(action: Any) -> None:
    submit = action(
        "submit",
        "run a program on a machine of the pool that takes jobs (gpu_jobs), when it gets a lease; prints its id",
        usage="logweir gpu submit [flags] -- CMD [ARG ...]",
        epilog="With --image the program runs on a node with Podman or Docker, as the user of its agent, and "
        "with the leased devices alone. Without CMD the container runs what the image says.",
    )
    _need(submit)
    submit.add_argument(
        "--retries",
        type=int,
        default=0,
        metavar="N",
        help="try again when its machine or lease is lost; of a gang also when a rank fails (0)",
    )
    submit.add_argument(
        "--one-process",
        action="store_true",
        help="with --devices: one program sees all devices, on one node; else each gets a process (a gang)",
    )
    submit.add_argument(
        "--image",
        metavar="IMAGE",
        help="run the program in a container of this image: registry/name:tag or name@sha256:...",
    )
    submit.add_argument(
        "--upload", metavar="DIR", help="copy this directory there; the program starts in the copy"
    )
    submit.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the program; repeatable",
    )
    submit.add_argument(
        "--grace",
        metavar="SPAN",
        default="10s",
        help="between asking the program to end and forcing it (10s)",
    )
    submit.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="CMD", help="the program and its arguments, after --"
    )
    action("jobs", "submitted programs: where each is, and why it waits")

    logs = action("logs", "the end of a job's output, at most 256 KiB")
    logs.add_argument("job", metavar="JOB", help="its id, as submit or jobs shows it")
    logs.add_argument("--follow", action="store_true", help="go on until the job has ended")
    logs.add_argument("--rank", type=int, default=0, metavar="N", help="of a gang: this process (0)")

    cancel = action("cancel", "end a job: one that waits is taken back, a program is asked to end")
    cancel.add_argument("job", metavar="JOB", help="its id")

    wait = action(
        "wait",
        "wait until a job has ended",
        epilog="The exit code is the program's; 75 when the job was lost or cancelled, or still lives.",
    )
    wait.add_argument("job", metavar="JOB", help="its id")
    wait.add_argument("--timeout", metavar="SPAN", help="give up after so long; default: wait for ever")
    wait.add_argument(
        "--results", metavar="DIR", help="write there what the program left in $GPU_JOB_RESULTS (rank 0's)"
    )


def _serving(action: Any) -> None:
    models = action(
        "models",
        "models that are served on leases: where each is ready and why one waits; put one there, remove one",
        usage="logweir gpu models [put NAME FILE | remove NAME] [flags]",
    )
    models.add_argument("change", nargs="?", choices=("put", "remove"), help="default: show all of them")
    models.add_argument("name", nargs="?", metavar="NAME", help="of the model, in its address")
    models.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="for put: an .onnx file, or a directory of `logweir models export`",
    )
    models.add_argument(
        "--memory",
        metavar="SIZE",
        help="for put: what one copy takes of a lease; default: twice its file and 64 MiB",
    )
    models.add_argument(
        "--replicas", type=int, default=1, metavar="N", help="for put: copies, each on another device (1)"
    )
    models.add_argument(
        "--tenant",
        metavar="NAME",
        default="logweir",
        help="whose model it is: keys of others do not see it (logweir)",
    )
    models.add_argument(
        "--version", type=int, metavar="N", help="for remove: only this version; default: all"
    )


def _lending(action: Any) -> None:
    request = action(
        "request", "lease for a program that is started some other way; prints what it needs to know"
    )
    _need(request)
    request.add_argument("--wait", metavar="SPAN", help="wait for so long at most; default: answer at once")
    request.add_argument(
        "--pid", type=int, metavar="PID", help="a process of this machine that will use it: after the lease "
        "its part stays taken while the driver lists that process",
    )  # fmt: skip
    request.add_argument(
        "--shell",
        action="store_true",
        help='print export lines: env=$(logweir gpu request ... --shell) && eval "$env"',
    )

    release = action("release", "give a lease back; its processes must be off the device")
    release.add_argument("lease", metavar="LEASE", help="its id, as request or leases shows it")
    release.add_argument("--token", type=int, required=True, metavar="N", help="the token given with it")

    revoke = action(
        "revoke",
        "take a lease away, now: `gpu run` and our own workers stop what runs in it; "
        "what was started after `gpu request` has to be ended by hand",
    )
    revoke.add_argument("lease", metavar="LEASE", help="its id, as `gpu leases` shows it")
    revoke.add_argument("--why", required=True, metavar="TEXT", help="what its holder is told")

    clear = action(
        "clear", "say that nothing of ended leases is on a device any more, so that all of it is free"
    )
    clear.add_argument("device", metavar="DEVICE", help="its UUID, or the beginning of it")
    clear.add_argument("--yes", action="store_true", help="also when the driver still sees processes there")

    mps = action("mps", "the MPS daemon of a GPU of this machine, which holds leases there to their limits")
    mps.add_argument("change", choices=("start", "stop", "status"), help="what to do with it")
    mps.add_argument("device", metavar="DEVICE", help="the UUID of the GPU, or the beginning of it")
    mps.add_argument("--yes", action="store_true", help="also where a lease or a program is there")

    action(
        "selftest",
        "what holds on the GPUs of this machine: limits, locks, MPS, MIG, training, scoring; a table to paste",
        epilog="The exit code is 0 when all checks passed or were skipped, 1 when one failed, 3 without a GPU.",
    )


def _percent(text: str) -> int:
    try:
        return int(text.removesuffix("%"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of percent; write 25") from None


def _cores(text: str) -> int:
    """Thousandths of a core."""
    try:
        milli = round(1000 * float(text))
    except (ValueError, OverflowError):
        milli = -1
    if not 0 <= milli <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of cores; write 4 or 0.5")
    return milli


def _need(parser: argparse.ArgumentParser) -> None:
    """The flags of a need."""
    parser.add_argument(
        "--memory", metavar="SIZE", help="per device, with CUDA's own share of it: 4GiB, 512MiB"
    )
    parser.add_argument(
        "--compute",
        type=_percent,
        default=0,
        metavar="PERCENT",
        help="share of a device's time, 0 to 100; with 0 none of it is reserved (0)",
    )
    parser.add_argument(
        "--exclusive",
        action="store_true",
        help="whole devices, alone; with --memory none that is smaller",
    )
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="all at once or none (1)")
    parser.add_argument(
        "--device-kind",
        choices=("any", "gpu", "slice"),
        default="any",
        help="whole GPUs or MIG slices; any: an exclusive need takes GPUs where the pool has enough (any)",
    )
    parser.add_argument(
        "--model", metavar="NAME", default="", help="only GPUs of this model: A100, or 'A100|H100'"
    )
    parser.add_argument(
        "--cpu",
        type=_cores,
        default=0,
        metavar="CORES",
        help="cores of the node for each device, 4 or 0.5; with 0 none are reserved (0)",
    )
    parser.add_argument(
        "--node-memory", metavar="SIZE", help="memory of the node for each device: 16GiB; default: none"
    )
    parser.add_argument("--same-node", action="store_true", help="all devices on one node, or none")
    parser.add_argument(
        "--tenant", metavar="NAME", default="logweir", help="who is charged; see gpu_tenants (logweir)"
    )
    parser.add_argument(
        "--priority", type=int, default=0, metavar="P", help="higher goes first, before fairness (0)"
    )
    parser.add_argument(
        "--for",
        dest="duration",
        metavar="SPAN",
        help="how long it is needed at most, 90s, 15m, 2h; short needs may overtake what waits for room",
    )
    parser.add_argument(
        "--preemptible", action="store_true", help="may be asked to give back for somebody who comes first"
    )
    parser.add_argument("--node", metavar="NAME", default="", help="only devices of this machine")
    parser.add_argument("--device", metavar="UUID", default="", help="only this device")
    parser.add_argument(
        "--no-torch-limit",
        action="store_true",
        help="leave PYTORCH_CUDA_ALLOC_CONF as it is, for a torch before 2.10, which refuses the limit",
    )
    parser.add_argument(
        "--name", metavar="ID", default="", help="id of the lease: letters, digits and . _ - (made up)"
    )
