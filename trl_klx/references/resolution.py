"""Old import path of the names below."""

from .adapter import AdapterReference as AdapterReference
from .base import KLReference as KLReference
from .building import resolve_reference as resolve_reference
from .fingerprint import fingerprint as fingerprint
from .loading import saved_steps as saved_steps
from .model import ModelReference as ModelReference
from .model import add_trl_lm_head as add_trl_lm_head
