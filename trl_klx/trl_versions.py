"""What differs between the supported versions of TRL."""

import trl
from packaging.version import Version


_INSTALLED = Version(trl.__version__)
# Before, `use_bias_correction_kl` was off by default.
TRL_CORRECTS_BIAS = _INSTALLED >= Version("1.10")
# Before, TRL knew one end of a completion: the EOS token of the tokenizer.
TRL_HAS_EOS_TOKEN_IDS = _INSTALLED >= Version("1.14.2")
# Since then TRL gives models an LM head of its own, which computes log-probs in tiles.
TRL_HAS_LM_HEAD = _INSTALLED >= Version("1.15")
