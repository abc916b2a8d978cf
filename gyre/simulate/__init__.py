"""The room `simulate`: what a run would take, by discrete events around the scheduler's own decisions."""
