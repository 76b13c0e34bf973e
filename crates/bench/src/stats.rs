//! Percentiles.

/// Returns the median; of two middle samples the lower.
pub(crate) fn median(samples: &[f64]) -> f64 {
    percentile(samples, 50.0)
}

/// Returns the smallest sample that is at least as large as `percent` of all; NaN without samples.
pub(crate) fn percentile(samples: &[f64], percent: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_returns_one_of_the_samples() {
        let samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(median(&samples), 50.0);
        assert_eq!(percentile(&samples, 99.0), 99.0);
        assert_eq!(percentile(&samples, 100.0), 100.0);
        assert_eq!(median(&[3.0, 1.0]), 1.0);
        assert!(median(&[]).is_nan());
    }
}
