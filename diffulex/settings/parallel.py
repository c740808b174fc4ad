"""Settings of parallel runs: sizes, devices, rendezvous."""

from dataclasses import dataclass

from diffulex.settings.spec import setting

__all__ = ["ParallelSettings"]


@dataclass(frozen=True)
class ParallelSettings:
    """How the work is spread over devices."""

    tensor_parallel_size: int = setting(2, help="Devices that share one copy of the model.", low=1, high=8)
    data_parallel_size: int = setting(1, help="Independent copies of the model.", low=1, high=1024)
    master_addr: str = setting("localhost", help="Address where the ranks meet.")
    master_port: int = setting(
        2333,
        help="Port where the ranks meet; unless written, a free one is taken when it is in use.",
        low=1,
        high=65535,
    )
    distributed_backend: str = setting("nccl", help="Communication between ranks.", choices=("nccl", "gloo"))
    distributed_timeout_seconds: int = setting(600, help="Seconds a collective operation may take.", low=1)
    shm_name: str = setting("", help="Name of the shared memory between ranks; empty makes a unique one.")
    device_start: int = setting(0, help="CUDA: first device index when device_ids is empty.", low=0)
    device_ids: tuple[int, ...] = setting(
        (), help="CUDA: logical device indices, one a rank; empty counts up from device_start.", low=0
    )
