"""What is at a path on a drive, and whether it is sound: checkpoints and swap directories, read and never touched.

report (what is said) -> reading (bytes against hashes) -> checkpoint, swap (one of each) -> inspect (a path)
"""
