"""Whether numpy gives a row of a product the same bits in any company.

Triton's interpreter multiplies tiles with it. On some processors its library sums the rows at a tile's end in another
order, so what holds of a GPU's tiles cannot be seen there.
"""

from functools import cache

import numpy as np

WHY_NOT = "numpy sums a row by its company on this processor, and Triton's interpreter multiplies with it"


@cache
def depend_on_company() -> bool:
    numbers = np.random.default_rng(0)
    for inner, outer in ((32, 32), (64, 32), (64, 64), (128, 64), (64, 128)):
        rows = numbers.standard_normal((128, inner), dtype=np.float32)
        columns = numbers.standard_normal((inner, outer), dtype=np.float32)
        whole = rows @ columns
        for height in (16, 32, 64):
            for start in range(0, 128 - height + 1, 3):
                if not np.array_equal(rows[start : start + height] @ columns, whole[start : start + height]):
                    return True
    return False
