# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of one host: the zygote that they are forks of, their processes, environment, output and errors."""
