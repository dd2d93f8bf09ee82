"""Hidden tests, run in a live sandbox, turned into a per-test report and a reward by the host."""

from tmax.verifier.foreign import verify_foreign
from tmax.verifier.hidden_tests import verify
from tmax.verifier.interpreter import bundle
from tmax.verifier.reward import binary, partial

__all__ = ["binary", "bundle", "partial", "verify", "verify_foreign"]
