# SPDX-License-Identifier: BSD-3-Clause
"""What all backends share: their interface, and the rules for states, root causes, retries and stored apps."""
