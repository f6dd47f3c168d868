"""Lets other libraries use flashtune with one line. Each module here is for one library.

A library is imported when its module is used. With torch and transformers, calls that flashtune does not
compute, or not faster, go to the operator that was there before. It also serves while kernels are compiled on
a worker thread. The functions for flash_attn and the backends for servers raise an error for calls that
flashtune does not compute.
"""


def wait(timeout: float | None = None) -> bool:
    """Waits until the kernels of all earlier calls are prepared.

    The next call of each kind binds them. So call the model, wait once, and call it again before CUDA graphs
    are captured.

    Args:
        timeout: The longest wait, in s. None for no limit.

    Returns:
        Whether all are prepared. False if the timeout ended first.
    """
    from flashtune.runtime.session import SESSION

    return SESSION.wait(timeout)
