//! Two CPUs that take turns, a look into the flow table at a time.

use std::{
    sync::{Arc, Condvar, Mutex},
    vec,
    vec::Vec,
};

/// Whose turn it is.
pub struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Who goes on at each of the next steps; after the last, they alternate.
    schedule: vec::IntoIter<bool>,
    current: usize,
    has_ended: [bool; 2],
}

impl Turns {
    /// Turns by this schedule: whether the next step is the other CPU's.
    pub fn new(schedule: Vec<bool>) -> Arc<Turns> {
        let state = State { schedule: schedule.into_iter(), current: 0, has_ended: [false; 2] };
        Arc::new(Turns { state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Ends a step of this CPU, and waits for its next.
    pub fn step(&self, cpu: usize) {
        let mut state = self.state.lock().unwrap();
        let is_others = state.schedule.next().unwrap_or(true);
        if is_others && !state.has_ended[1 - cpu] {
            state.current = 1 - cpu;
            self.changed.notify_all();
        }
        drop(self.changed.wait_while(state, |state| state.current != cpu).unwrap());
    }

    /// Runs all of a CPU's steps.
    pub fn run<T>(&self, cpu: usize, work: impl FnOnce() -> T) -> T {
        struct End<'a>(&'a Turns, usize);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                let mut state = self.0.state.lock().unwrap();
                state.has_ended[self.1] = true;
                state.current = 1 - self.1;
                self.0.changed.notify_all();
            }
        }
        let _end = End(self, cpu);
        drop(self.changed.wait_while(self.state.lock().unwrap(), |state| state.current != cpu).unwrap());
        work()
    }
}
