"""What a checkpoint holds: tensors and plain data, nested in dictionaries and lists."""

from typing import Any

State = dict[str, Any]
