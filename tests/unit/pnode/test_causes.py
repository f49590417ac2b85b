from __future__ import annotations

import pytest
import torch

from pnode.causes import cause_of
from pnode.events import Cause
from storage.store import CorruptError, StoreUnavailableError
from wire.errors import BadFileError, MisuseError, RemoteError


def torch_error(make: object) -> BaseException:
    try:
        make()  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (SystemExit("gone"), Cause.COMPUTE),
        (KeyboardInterrupt(), Cause.COMPUTE),
        (MemoryError(), Cause.COMPUTE),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), Cause.COMPUTE),
        (torch_error(lambda: torch.empty(1 << 50)), Cause.COMPUTE),
        (torch_error(lambda: torch.zeros(2)[7]), Cause.INPUT),
        (torch_error(lambda: torch.nn.Embedding(3, 2)(torch.tensor([9]))), Cause.INPUT),
        (torch_error(lambda: torch.ones(2, 3) @ torch.ones(2, 3)), Cause.DEFECT),
        (CorruptError("bad"), Cause.INPUT),
        (BadFileError("bad"), Cause.INPUT),
        (StoreUnavailableError("away"), Cause.STORE),
        (MisuseError("no memory? out of memory, says a text of ours"), Cause.DEFECT),
        (RemoteError("odd"), Cause.DEFECT),
        (ValueError("odd"), Cause.DEFECT),
    ],
)
def test_only_what_lies_with_this_pnode_is_laid_to_it(error: BaseException, cause: Cause) -> None:
    assert cause_of(error) is cause
