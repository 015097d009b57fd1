"""Old import path of the names below."""

from .fingerprint import hash_tensors as hash_tensors
from .peft_adapters import adapter_tensors as adapter_tensors
from .peft_adapters import trained_adapter as trained_adapter
