# SPDX-License-Identifier: BSD-3-Clause
"""Values shared by the submit side and the job side: results, role metadata, environment variable names, JSON."""
