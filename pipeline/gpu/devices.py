"""What devices there are, as values. Probing belongs to a later module (nvml); this one never touches a device."""

from typing import Final

# The resource names leases are taken on. One GPU for now: the pool widens this to one per device UUID.
GPU: Final = "gpu0"
# Training without a GPU takes this lease instead, so that two trainers never run at once there either.
CPU_TRAINING: Final = "cpu-training"
# The single writer of the template tree.
DRAIN: Final = "drain"
