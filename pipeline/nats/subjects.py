"""The subjects of Opni's services: what each log subject carries, and where its results go."""

from typing import Final, NamedTuple

# Where results go.
INFERENCED: Final = "inferenced_logs"
TEMPLATES: Final = "templates_index"
MODEL_INFERENCED: Final = "model_inferenced_workload_logs"
PRETRAINED_INFERENCED: Final = "model_inferenced_pretrained_logs"
# Requests, and control messages.
GPU_RUNNING: Final = "gpu_service_running"
GPU_INFERENCE: Final = "gpu_service_inference"
GPU_LOGS: Final = "gpu_service_inference_internal"
GPU_TRAINING: Final = "gpu_service_training_internal"
JOB_STATUS: Final = "gpu_trainingjob_status"
MODEL_STATUS: Final = "model_status"
WORKLOAD_PARAMETERS: Final = "workload_parameters"
TRAIN_MODEL: Final = "train_model"
TRAIN: Final = "train"
MODEL_UPDATE: Final = "model_update"
MODEL_WORKLOADS: Final = "model_workload_parameters"
# The stream of results holds them under this prefix. The server publishes each again without it, once stored:
# subscribers to a subject of Opni see a message that came twice only once.
OUT_PREFIX: Final = "logweir.out."
EVENTS_PREFIX: Final = "logweir.events."  # of subjects of events, such as logweir.events.model.live
WORKERS: Final = "workers"  # the queue group of Opni's services
ANSWERERS: Final = "logweir"  # the queue group of gateways, of which one answers a request


class Flow(NamedTuple):
    """A log subject. `is_list`: its messages are `PayloadList`, else one `Payload` each."""

    is_list: bool
    out: str


FLOWS: Final = {
    "raw_logs": Flow(False, INFERENCED),
    "preprocessed_logs_workload": Flow(True, INFERENCED),
    "preprocessed_logs_pretrained_model": Flow(True, INFERENCED),
    "opnilog_workload_logs": Flow(True, MODEL_INFERENCED),
    "gpu_service_inference_internal": Flow(True, MODEL_INFERENCED),
    "opnilog_cp_logs": Flow(True, PRETRAINED_INFERENCED),
    "opnilog_rancher_logs": Flow(True, PRETRAINED_INFERENCED),
    "opnilog_longhorn_logs": Flow(True, PRETRAINED_INFERENCED),
}


def family(subject: str) -> str:
    """The log subject that this one is a part of, "" for none: `raw_logs.3` of a partitioned `raw_logs`."""
    if subject in FLOWS:
        return subject
    head = subject.partition(".")[0]
    return head if head in FLOWS else ""
