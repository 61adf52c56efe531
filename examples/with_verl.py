# SPDX-License-Identifier: Apache-2.0
"""Has verl's FSDP workers offload activations with this engine instead of verl's own.

verl imports this module in each worker that is told so, by `model.external_lib`; with `enable_activation_offload` the
worker then calls `offload_engine.enable_activation_offloading`, whose arguments are verl's. examples/verl_sft.sh shows
a whole command. Needs verl 0.9 (engine workers) and GPUs.
"""

from verl.workers.engine.fsdp import transformer_impl

from offload_engine import enable_activation_offloading

if not hasattr(transformer_impl, "enable_activation_offloading"):
    raise ImportError(
        "with_verl: verl.workers.engine.fsdp.transformer_impl no longer calls enable_activation_offloading; "
        "this example is for verl 0.9"
    )
transformer_impl.enable_activation_offloading = enable_activation_offloading
