"""The report of a run: figures (`summary`), plots, example trajectories and one page that holds them all."""
