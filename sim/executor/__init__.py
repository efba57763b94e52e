"""The fast executor: answers plans from models of cost and of acceptance."""
