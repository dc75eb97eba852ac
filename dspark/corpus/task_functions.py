# ruff: noqa: E501 (a function is one line, however long)
"""Small Python functions of the code tasks, as data: signature, what it does, its expression.

All of it was written for this project.
"""

__all__ = ["FUNCTIONS"]

FUNCTIONS = """
count_vowels(text)|Count the vowels in text.|sum(c in 'aeiou' for c in text)
count_long_words(text, k)|How many words of text have more than k letters?|sum(len(w) > k for w in text.split())
letter_counts(word)|Map each letter of word, in alphabetical order, to how often it occurs.|{c: word.count(c) for c in sorted(word)}
first_repeated_letter(word)|Return the first letter of word that has occurred before, or None.|next((c for i, c in enumerate(word) if c in word[:i]), None)
acronym(text)|Build an acronym in capitals from the first letters of the words in text.|''.join(w[0].upper() for w in text.split())
shift_letters(word, k)|Shift each lowercase letter k places forward in the alphabet; after z comes a.|''.join(chr((ord(c) - 97 + k) % 26 + 97) for c in word)
has_unique_letters(word)|Check that no letter occurs twice in word.|len(set(word)) == len(word)
run_lengths(word)|Return pairs of a letter and the length of its run, in order.|[(c, len([*g])) for c, g in groupby(word)]
vowel_positions(word)|Return the positions, from 0, at which word has a vowel.|[i for i, c in enumerate(word) if c in 'aeiou']
shared_letters(word, other)|Return the letters that both words contain, as a sorted string.|''.join(sorted(set(word) & set(other)))
split_word(word, k)|Split word after k letters and return both parts.|(word[:k], word[k:])
rotate_word(word, k)|Move the first k letters of word to its end.|word[k:] + word[:k]
alternate_case(word)|Write the letters at even positions in upper case, the others in lower case.|''.join(c.upper() if i % 2 == 0 else c for i, c in enumerate(word))
word_value(word)|Add up the positions of the letters in the alphabet (a is 1).|sum(ord(c) - 96 for c in word)
by_last_letter(text)|Sort the words of text by their last letter; equal ones keep their order.|sorted(text.split(), key=lambda w: w[-1])
weave_words(word, other)|Take letters from word and other in turn until the shorter one ends.|''.join(a + b for a, b in zip(word, other))
repeat_letters(word, k)|Repeat every letter of word k times.|''.join(c * k for c in word)
longest_word_length(text)|Return the length of the longest word in text.|max(len(w) for w in text.split())
flip_words(text)|Reverse each word of text but keep the order of the words.|' '.join(w[::-1] for w in text.split())
words_by_length(text)|Group the words of text by their length in a dictionary.|{n: [w for w in text.split() if len(w) == n] for n in sorted({len(w) for w in text.split()})}
strip_ends(word)|Return word without its first and last letter.|word[1:-1]
to_snake(text)|Join the words of text with underscores and end with a capital X.|'_'.join(text.split()) + 'X'
chunks(items, k)|Cut items into lists of length k; the last one may be shorter.|[items[i:i + k] for i in range(0, len(items), k)]
window_sums(items)|Return the sums of all neighbouring pairs in items.|[a + b for a, b in zip(items, items[1:])]
rotate_left(items, k)|Rotate items k places to the left (k may exceed the length).|items[k % len(items):] + items[:k % len(items)]
steps(items)|Return the change from each item to the next.|[b - a for a, b in zip(items, items[1:])]
peaks(items)|Return the items that are larger than both of their neighbours.|[b for a, b, c in zip(items, items[1:], items[2:]) if a < b > c]
second_largest(items)|Return the second largest different value, or None.|([None] + sorted(set(items)))[-2]
position_of_largest(items)|Return the index of the first largest item.|items.index(max(items))
is_rising(items)|Is every item larger than the one before it?|all(a < b for a, b in zip(items, items[1:]))
partition(items, n)|Return two lists: the items below n and the others, both in order.|([x for x in items if x < n], [x for x in items if x >= n])
frequencies(items)|Map each different item, smallest first, to the number of times it occurs.|{x: items.count(x) for x in sorted(items)}
running_maximum(items)|For every position, return the largest item so far.|[max(items[:i + 1]) for i in range(len(items))]
merge(items, others)|Merge both lists into one sorted list.|sorted(items + others)
only_in_first(items, others)|Return the items that others does not contain, in order.|[x for x in items if x not in others]
dot_product(items, others)|Multiply the lists item by item, up to the shorter length, and add up the products.|sum(a * b for a, b in zip(items, others))
drop_every_kth(items, k)|Remove the k-th, 2k-th, 3k-th ... item.|[x for i, x in enumerate(items, 1) if i % k]
trimmed_sum(items)|Add up the items without one smallest and one largest item.|sum(sorted(items)[1:-1])
closest(items, n)|Return the item that is closest to n; the first one in a tie.|min(items, key=lambda x: abs(x - n))
pairs_above(items, n)|Count the pairs of different positions whose items sum to more than n.|sum(a + b > n for i, a in enumerate(items) for b in items[i + 1:])
to_front(items, n)|Put the items divisible by n first; keep the order within both groups.|[x for x in items if x % n == 0] + [x for x in items if x % n]
weighted_sum(items)|Multiply each item by its position, from 1, and add up the results.|sum(i * x for i, x in enumerate(items, 1))
ranks(items)|Replace each item by its rank among the different values (smallest is 1).|[sorted(set(items)).index(x) + 1 for x in items]
longest_gap(items)|Return the largest difference between neighbours of the sorted items.|max(b - a for a, b in zip(sorted(items), sorted(items)[1:]))
balance_point(items)|Return the first index where the sum on the left is at least the sum on the right, or -1.|next((i for i in range(len(items)) if sum(items[:i]) >= sum(items[i + 1:])), -1)
reverse_digits(n)|Reverse the decimal digits of the non-negative integer n.|int(str(n)[::-1])
divisors(n)|List all positive divisors of n.|[d for d in range(1, n + 1) if n % d == 0]
is_prime_number(n)|Tell whether n is prime.|n > 1 and all(n % d for d in range(2, n))
primes_below(n)|List the primes smaller than n.|[p for p in range(2, n) if all(p % d for d in range(2, p))]
binary_digits(n)|Return the binary digits of n as a list, most significant first.|[int(d) for d in bin(n)[2:]]
sum_multiples(n, k)|Add up the multiples of k that are at most n.|sum(range(k, n + 1, k))
digital_root(n)|Add up the digits of n until one digit is left.|1 + (n - 1) % 9
clock(n)|Turn n minutes after midnight into a string such as '07:05'.|f'{n // 60 % 24:02d}:{n % 60:02d}'
countdown(n, k)|Count down from n in steps of k as long as the number is positive.|[*range(n, 0, -k)]
fizz(n)|List the numbers from 1 to n, with 'fizz' in place of multiples of 3.|['fizz' if i % 3 == 0 else i for i in range(1, n + 1)]
is_leap(n)|Would the year 1900 + n be a leap year?|(1900 + n) % 4 == 0 and ((1900 + n) % 100 != 0 or (1900 + n) % 400 == 0)
digit_product(n)|Multiply the decimal digits of n.|prod(int(d) for d in str(n))
in_base(n, k)|Write n in base k (2 to 9) as a string.|''.join(str(n // k**i % k) for i in reversed(range(12))).lstrip('0') or '0'
split_bill(n, k)|Divide n coins among k friends: return the share of each and the rest.|divmod(n, k)
multiples_table(n, k)|Return a dictionary that maps 1 to k to the multiples of n.|{i: i * n for i in range(1, k + 1)}
cheapest(prices)|Return the name with the lowest price.|min(prices, key=lambda name: prices[name])
total_price(prices)|Add up all prices.|sum(prices.values())
affordable(prices, n)|Return the names, in alphabetical order, whose price is at most n.|sorted(name for name in prices if prices[name] <= n)
by_price(prices)|Return the names from the most to the least expensive.|sorted(prices, key=lambda name: -prices[name])
raise_prices(prices, k)|Return a new dictionary in which every price is k higher.|{name: price + k for name, price in prices.items()}
swap_keys(prices)|Return a dictionary from prices to names.|{price: name for name, price in prices.items()}
price_range(prices)|Return the lowest and the highest price as a tuple.|(min(prices.values()), max(prices.values()))
transpose(matrix)|Exchange rows and columns.|[[*column] for column in zip(*matrix)]
row_sums(matrix)|Return the sum of every row.|[sum(row) for row in matrix]
column_maxima(matrix)|Return the largest value of every column.|[max(column) for column in zip(*matrix)]
flatten(matrix)|Put all rows one after the other into one list.|[x for row in matrix for x in row]
mirror(matrix)|Reverse each row.|[row[::-1] for row in matrix]
scale(matrix, k)|Multiply every entry by k.|[[k * x for x in row] for row in matrix]
largest_row(matrix)|Return the index of the row with the largest sum; the first one in a tie.|max(range(len(matrix)), key=lambda i: sum(matrix[i]))
clockwise(matrix)|Rotate the matrix by 90 degrees clockwise.|[[*row] for row in zip(*matrix[::-1])]
count_above(matrix, n)|Count the entries that are greater than n.|sum(x > n for row in matrix for x in row)
"""
