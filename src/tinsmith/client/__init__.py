"""The SDK: clients for training, sampling and administration, written once, used from plain and async code."""
