//! Laws of policies: compiled, called, chained, replaced, replayed, stored and damaged.

mod bundle;
mod chain;
mod compile;
mod damage;
mod fuzz;
mod hostile;
mod params;
mod reload;
mod replay;
