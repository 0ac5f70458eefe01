"""The command line.

::

    main.py                 all commands; what they raise becomes one line
      generate.py           chat, in terminal_chat.py, and generate
      serve.py              serve; cluster.py: replica and ingress; vllm_command.py: these as vLLM's are called
      observe.py            inspect, simulate and explain
      demo.py, doctor.py, warm.py, keys.py, store.py                        those of the same name
      bench.py              bench; gpu_bench.py: its commands for GPUs
    options.py              options, made of the fields of configurations; config_file.py: from a file
    output_paths.py, consoles.py, plain_help.py                           where results go, and how help is written
    exits.py                how commands end
"""
