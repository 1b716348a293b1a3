# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Values that both sides of a job share: results of ranks and jobs, role metadata, environment names, JSON."""
