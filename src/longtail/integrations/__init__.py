"""Where people train: callbacks for Hugging Face's Trainer and Lightning, a metric for torchmetrics.

Each file needs its library and nothing else does: `from longtail.integrations.lightning import CalibrateCallback`.
"""
