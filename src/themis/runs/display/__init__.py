"""How a run and its faults are shown: text, figures and notebook output."""
