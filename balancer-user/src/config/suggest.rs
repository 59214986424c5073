/// The candidate that `word` is most likely a misspelling of: at most two letters away, and nearer than a
/// third of its length.
pub(super) fn closest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if word.len() > 64 {
        return None;
    }
    candidates
        .map(|candidate| (distance(word, candidate), candidate))
        .filter(|&(distance, candidate)| distance <= 2 && distance * 3 <= candidate.len())
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, candidate)| candidate)
}

/// Levenshtein distance; `_` and `-` count as the same letter.
fn distance(a: &str, b: &str) -> usize {
    let letters = |text: &str| text.replace('_', "-").to_lowercase().chars().collect::<Vec<_>>();
    let (a, b) = (letters(a), letters(b));
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (above, letter_a) in a.iter().enumerate() {
        let mut diagonal = above;
        row[0] = above + 1;
        for (left, letter_b) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(letter_a != letter_b);
            diagonal = row[left + 1];
            row[left + 1] = replaced.min(diagonal + 1).min(row[left] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, expected) in [
            ("", "", 0),
            ("", "abc", 3),
            ("adress", "address", 1),
            ("kitten", "sitting", 3),
            ("idle_timeout", "idle-timeout", 0),
            ("WEIGHT", "weight", 0),
        ] {
            assert_eq!(distance(a, b), expected, "{a} {b}");
            assert_eq!(distance(b, a), expected, "{b} {a}");
        }
    }

    #[test]
    fn only_what_is_near_is_suggested() {
        let keys = ["name", "address", "weight"];
        assert_eq!(closest("adress", keys.into_iter()), Some("address"));
        assert_eq!(closest("wieght", keys.into_iter()), Some("weight"));
        assert_eq!(closest("nm", keys.into_iter()), None);
        assert_eq!(closest("tls", keys.into_iter()), None);
    }
}
