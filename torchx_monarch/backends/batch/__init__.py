# SPDX-License-Identifier: BSD-3-Clause
"""The base of backends for batch systems whose nodes share a folder with the submitting machine.

backend     submit, read and end apps; a batch system adds how to submit, to read the queue, and to cancel
folder      the folder of an app, and the request in it
snapshot    the state of replicas, by records and by the batch system
task        what a job runs: one replica under the supervisor's loop
sge         Grid Engine
"""
