//! RFC 3339 timestamps, written and read.

use std::time::{SystemTime, UNIX_EPOCH};

/// Formats a time as RFC 3339 in UTC, with whole seconds.
pub fn timestamp(time: SystemTime) -> String {
    format!("{}Z", date_and_time(since_epoch(time).0, 'T'))
}

/// Formats a time as RFC 3339 in UTC, with milliseconds.
pub fn timestamp_millis(time: SystemTime) -> String {
    let (seconds, millis) = since_epoch(time);
    format!("{}.{millis:03}Z", date_and_time(seconds, 'T'))
}

fn since_epoch(time: SystemTime) -> (i64, u32) {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    (seconds, since.subsec_millis())
}

/// Formats date and time of day in UTC; `seconds` are counted from 1970 and may be negative.
pub fn date_and_time(seconds: i64, separator: char) -> String {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Howard Hinnant's calendar algorithm: years begin in March, so that a leap day is the last day
    // of its year. An era has 400 years.
    let shifted = days + 719_468;
    let (era, day) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = (march_month + 2) % 12 + 1;
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}{separator}{hour:02}:{minute:02}:{second:02}")
}

/// Parses a time in UTC, as in `2027-01-31T12:00:00Z`, into seconds since 1970. A date alone, as in
/// `2027-01-31`, means its end: the first second of the next day.
pub fn parse_utc(text: &str) -> Option<u64> {
    const DAY: u64 = 86_400;
    let number = |digits: &str, length: usize| {
        let only_digits = digits.bytes().all(|byte| byte.is_ascii_digit());
        (digits.len() == length && only_digits).then(|| digits.parse::<u64>().ok())?
    };
    let (date, time) = match text.split_once('T') {
        Some((date, time)) => (date, Some(time.strip_suffix('Z')?)),
        None => (text, None),
    };
    let mut parts = date.split('-');
    let (year, month, day) = (parts.next()?, parts.next()?, parts.next()?);
    let (year, month, day) = (number(year, 4)?, number(month, 2)?, number(day, 2)?);
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let length_of = |month: u64| match month {
        2 => 28 + u64::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    let is_date = parts.next().is_none()
        && year >= 1970
        && (1..=12).contains(&month)
        && (1..=length_of(month)).contains(&day);
    if !is_date {
        return None;
    }
    let years: u64 = (1970..year)
        .map(|year| 365 + u64::from(is_leap(year)))
        .sum();
    let months: u64 = (1..month).map(length_of).sum();
    let midnight = (years + months + day - 1) * DAY;
    let Some(time) = time else {
        return Some(midnight + DAY);
    };
    let mut parts = time.split(':');
    let (hour, minute, second) = (parts.next()?, parts.next()?, parts.next()?);
    let (hour, minute, second) = (number(hour, 2)?, number(minute, 2)?, number(second, 2)?);
    let is_time = parts.next().is_none() && hour < 24 && minute < 60 && second < 60;
    is_time.then(|| midnight + hour * 3600 + minute * 60 + second)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_in_utc_are_seconds_since_1970() {
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", 0),
            ("1970-01-01", 86_400),
            ("2000-02-29T12:34:56Z", 951_827_696),
            ("2027-01-15T08:00:00Z", 1_800_000_000),
            ("2026-12-31", 1_798_761_600),
        ] {
            assert_eq!(parse_utc(text), Some(seconds), "{text}");
        }
        for text in [
            "",
            "2026",
            "2026-13-01",
            "2026-02-29",
            "2026-1-1",
            "2026-01-01T00:00:00",
            "1969-01-01",
            "2026-01-01T24:00:00Z",
            "2026-01-01T00:00Z",
            "2026-01-01-01",
            "+026-01-01",
        ] {
            assert_eq!(parse_utc(text), None, "{text}");
        }
    }

    #[test]
    fn timestamp_millis_writes_three_digits() {
        let time = UNIX_EPOCH + Duration::from_millis(1_709_210_096_007);
        assert_eq!(timestamp(time), "2024-02-29T12:34:56Z");
        assert_eq!(timestamp_millis(time), "2024-02-29T12:34:56.007Z");
    }
}
