//! The generations of the running configuration: each change makes another one, and the last ones can be gone back to.

use std::collections::VecDeque;

/// Most generations that are kept.
const KEPT: usize = 16;

/// A configuration that was or is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generation {
    /// Counted from 1, from the start of the daemon on.
    pub number: u64,
    /// What made it.
    pub what: String,
    /// The text of it.
    pub text: String,
}

/// The last generations; the one in force is always there.
#[derive(Clone, Debug)]
pub struct History {
    current: Generation,
    /// The latest last.
    before: VecDeque<Generation>,
}

impl History {
    /// The first generation.
    pub fn new(what: String, text: String) -> History {
        History { current: Generation { number: 1, what, text }, before: VecDeque::new() }
    }

    /// What is in force.
    pub const fn current(&self) -> &Generation {
        &self.current
    }

    /// Another generation is in force.
    pub fn push(&mut self, what: String, text: String) {
        let next = Generation { number: self.current.number + 1, what, text };
        self.before.push_back(std::mem::replace(&mut self.current, next));
        if self.before.len() >= KEPT {
            self.before.pop_front();
        }
    }

    /// The same generation is written differently.
    pub fn rewrite(&mut self, text: String) {
        self.current.text = text;
    }

    /// An earlier generation; without a number, the last one.
    pub fn earlier(&self, number: Option<u64>) -> Option<&Generation> {
        match number {
            None => self.before.back(),
            Some(number) => self.before.iter().find(|generation| generation.number == number),
        }
    }

    /// The numbers of the earlier generations that are kept, in ascending order.
    pub fn numbers(&self) -> impl Iterator<Item = u64> {
        self.before.iter().map(|generation| generation.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_generations_are_kept() {
        let mut history = History::new("start".to_owned(), "1".to_owned());
        assert_eq!(history.earlier(None), None);
        for number in 2..=20 {
            history.push(format!("change {number}"), number.to_string());
        }
        assert_eq!((history.current().number, history.current().text.as_str()), (20, "20"));
        assert_eq!(history.numbers().collect::<Vec<_>>(), (5..20).collect::<Vec<_>>());
        assert_eq!(history.earlier(None).unwrap().text, "19");
        assert_eq!(history.earlier(Some(7)).unwrap().what, "change 7");
        assert_eq!(history.earlier(Some(4)), None);
        assert_eq!(history.earlier(Some(20)), None, "it is in force");
        history.rewrite("XX".to_owned());
        assert_eq!((history.current().number, history.current().text.as_str()), (20, "XX"));
    }
}
