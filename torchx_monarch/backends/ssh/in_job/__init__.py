# SPDX-License-Identifier: BSD-3-Clause
"""What runs on the machines: the entry that ssh starts, and the orders that it carries out."""
