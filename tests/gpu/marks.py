"""Marks that modules of GPU tests share."""

import pytest
import torch

ON_HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
# Calls that the runtime serves as if nothing were tuned, and whose fallbacks are no news.
SERVED = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("untuned"),
    pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning"),
]
