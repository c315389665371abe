"""The tables and figures of the MARC paper, made anew beside the paper's numbers."""
