"""Models: loading, quantisation, the runner, CUDA graphs, compiled and packed layers, pool sizing.

::

    loader.py               from a hub id, a folder, a GGUF file or memory to a model that is ready to run
      placement.py          on which device, in which type, by native code or not
      source.py, hub.py, weight_paths.py                                  where files are
      checkpoint.py, deferred_weights.py, whole_weights.py                weights
      gguf_model.py, gguf_*.py, default_model.py                          GGUF files
      quantised/            checkpoints whose weights others have quantised
      unused_parts.py       what text does not call is dropped
      supported.py          which models can run over blocks, as far as configurations tell
      tokenizer.py, text_interface.py, generation_config.py               what is beside the weights
      model_cache.py        what is made from models once, on disk
    runner.py               one forward pass over a packed batch, which model_input.py describes
      structure.py          the layers, and whether they can run over blocks, found out by a run
                            (layer_probe.py, batch_checks.py)
      forward_pass.py       what the layers call while the model runs
      attention_function.py what transformers' layers call, and what leads to `radixkv.attention`
      longrope.py, rotary_types.py, window_mask.py                        what depends on positions
    modules replaced by faster ones, each only where `equivalence.py` finds the same results (attention_parts.py,
    watched_calls.py, replace_modules.py):
      native/               native code on a CPU
      packed_linear.py, shared_input.py                                   torch's own packed products
      merged_linear.py, deferred_rotation.py, decode_graphs.py, cuda_graph.py, compiled_layers.py    on a GPU
    pool_sizing.py, kv_quantisation.py                                    the pool
    fingerprint.py          a name for everything that keys and values depend on
    quantisation_report.py  what the log says of a model's weights
    memory of the weights: mapped_weights.py, heap.py gives back what loading left; shared_weights.py for several processes;
    large_pages.py
    of the process: frameworks.py imports torch, without_torch.py does without; onednn_cache.py

Models are transformers' own code; those that are refused: docs/limits.md.
"""
