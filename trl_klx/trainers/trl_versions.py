"""What differs between the versions of TRL that are supported, where our trainers must know."""

import trl
from packaging.version import Version


_INSTALLED = Version(trl.__version__)
# Before, TRL knew one end of a completion: the EOS token of the tokenizer.
TRL_HAS_EOS_TOKEN_IDS = _INSTALLED >= Version("1.14.2")
