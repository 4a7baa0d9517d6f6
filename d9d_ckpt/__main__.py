"""``python -m d9d_ckpt`` is ``d9d-ckpt``."""

import sys

from d9d_ckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
