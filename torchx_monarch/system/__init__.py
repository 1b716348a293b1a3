# SPDX-License-Identifier: BSD-3-Clause
"""Access to the operating system: processes, files and text that other users or ranks may have changed, text output."""
