"""Models: loading, quantisation, the runner, graphs, replaced modules, pool sizing.

::

    loader.py               from a hub id, a folder, a GGUF file or memory to a model that is ready to run
      compute_target.py     on which device, in which type, by native code or not
      source.py, hub.py, default_model.py                                 where files are
      weights/              from files into memory, and what memory they take there
      gguf/                 GGUF files
      quantised/            checkpoints whose weights others have quantised
      supported.py          which models can run over blocks, by their configurations
      tokenizer.py, text_interface.py, generation_config.py               what is beside the weights
        chat_templates.py   templates in place of a tokenizer's own
      silence.py            transformers' warnings meanwhile
      model_cache.py        what is made from models once, on disk
    runner.py               one forward pass over a packed batch, which model_input.py describes
      structure.py          the layers, and whether they can run over blocks, found out by a run
                            (layer_probe.py, batch_checks.py, model_errors.py)
      out_of_memory.py      whether an error was raised for lack of memory
      forward_pass.py       what the layers call while the model runs
      logits_to_keep.py     logits of some rows, also of models that compute all
      attention_function.py what transformers' layers call, and what leads to `radixkv.attention`
      positions/            what depends on positions: rotation, windows
    recurrent/              layers that keep states in place of keys and values
    replacement/            modules replaced by faster ones, and how it is found out that these do the same
      native/               by native code on a CPU
    graphs/                 layers compiled by torch, decoding steps as CUDA graphs
    pool_sizing.py, kv_quantisation.py                                    the pool
    fingerprint.py          a name for everything that keys and values depend on
    quantisation_report.py  what the log says of a model's weights
    of the process: frameworks.py imports torch, without_torch.py does without; onednn_cache.py bounds its memory

Models are transformers' own code; those that are refused: docs/limits.md.
"""
