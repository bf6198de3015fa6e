"""What devices there are, as values. Probing belongs to a later module (nvml); this one never touches a device."""

from typing import Final

# The resource names leases are taken on. One GPU for now: the pool widens this to one per device UUID.
GPU: Final = "gpu0"
# Whoever trains, on whatever device, holds this; its token is the fence of a publish.
TRAINING: Final = "training"
# The single writer of the template tree.
DRAIN: Final = "drain"
# Whoever polls the log indices of an OpenSearch: two would read the same documents at once.
SOURCE: Final = "source"
RESOURCES: Final = (GPU, TRAINING, DRAIN, SOURCE)
