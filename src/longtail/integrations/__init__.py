"""Integrations: callbacks for Hugging Face's Trainer and Lightning, a metric for torchmetrics.

Only these files need those libraries: `from longtail.integrations.lightning import CalibrateCallback`.
"""
