"""The API process: authorises, validates, journals, orders, answers. Never imports torch."""
