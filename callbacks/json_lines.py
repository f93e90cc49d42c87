"""One JSON object a line, as strict JSON: what is not a finite number is null."""

import json
import math
from typing import Any


def json_line(row: dict[str, Any]) -> str:
    """`row` as one line with its newline. Text stays readable: no escapes outside ASCII."""
    return json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
