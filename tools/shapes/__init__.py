"""What `train_demo_model.py` consists of: procedural videos of shapes, the training, its files."""
