from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.version.cuda else ["test_*.py"]
