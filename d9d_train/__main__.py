"""``python -m d9d_train`` is ``d9d-train``."""

import sys

from d9d_train.cli import main

if __name__ == "__main__":
    sys.exit(main())
