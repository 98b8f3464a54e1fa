"""Write a KD cache from a teacher."""
